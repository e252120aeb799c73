export default chartWidget;
