export default steppedWidget;
